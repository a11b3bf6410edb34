"""The models of a router: `RouterService` has the fleet, and streams tell how they wait."""
