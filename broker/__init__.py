"""The broker: forwards frames, so that every process needs one address. It imports no torch and opens no payload."""
