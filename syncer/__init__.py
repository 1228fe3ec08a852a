"""The syncer: merges deltas under a quorum and a grace window, and publishes the merged fragments."""
