"""How a server loads, monitors, unloads and reloads its model."""
