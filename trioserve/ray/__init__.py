"""Models on many machines: trioserve as a Ray Serve application. It needs ``trioserve[ray]``."""
