"""What bounds requests: places in the queue, memory, requests a minute, threads, shared caches."""
