"""Images, sound and video of clients: recognized, and decoded under limits in another process."""
