"""Learner: the session of a training script with a run, its network thread, and the built-in training task."""
