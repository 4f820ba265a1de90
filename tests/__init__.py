"""The tests: one directory a room, and the process pool that gives a test its ranks."""
