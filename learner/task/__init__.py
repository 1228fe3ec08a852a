"""The built-in training task: a byte-level transformer on text, written like a user's own script around a session."""
