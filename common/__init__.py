"""Modules that at least two parts share: settings, errors, wire, codec, fragments, sockets, registry, log."""
