"""The `diloco` command: options made from the settings, and one function for each subcommand."""
