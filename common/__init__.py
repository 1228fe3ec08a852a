"""The ground floor: names, settings, wire, codec, sockets, registry, log and errors that at least two parts share."""
