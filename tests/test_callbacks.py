from trl_grpo_ext.callbacks import plot_training


def test_plots_what_was_logged(tmp_path):
    history = [
        {"step": 1, "reward": 0.5, "step_reward": 0.6, "kl": 0.0, "completions/mean_length": 30.0},
        {"step": 2, "eval_reward": 0.4},
        {"step": 2, "reward": 0.7, "kl": 0.1, "completions/mean_length": 31.0},
    ]
    plot_training(history, tmp_path / "picture.svg", "A run")
    drawn = (tmp_path / "picture.svg").read_text()
    for title in ("A run", "Held-out accuracy", "KL to the reference", "Completion length"):
        assert title in drawn


def test_plots_an_empty_history(tmp_path):
    plot_training([], tmp_path / "picture.png", "Nothing")
    assert (tmp_path / "picture.png").exists()
