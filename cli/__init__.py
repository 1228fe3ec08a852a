"""The `diloco` command: options derived from the settings, and one function per subcommand."""
