"""Communication: bytes between ranks, the threads that send them, and what ranks agree on."""
