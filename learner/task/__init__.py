"""The built-in training: a byte-level transformer on text, in the way of a user's own script around a session."""
