"""The learner: inner steps by whoever trains, and the session that keeps its model in touch with the run."""
