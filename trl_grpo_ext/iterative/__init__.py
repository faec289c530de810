"""Algorithm 1 of DeepSeekMath besides its trainer: rollouts, reward models that go on learning, reference."""
