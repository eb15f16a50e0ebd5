"""What follows from an event: asks the roles, in a fixed order."""
