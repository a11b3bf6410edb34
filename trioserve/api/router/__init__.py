"""The models of a router: `RouterService` has the fleet, and a stream tells how it waits for one."""
