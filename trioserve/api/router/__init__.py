"""The models of a router: `RouterService` has the fleet, and its requests go to the processes."""
