"""The three generating routes: clients' calls become requests of the scheduler."""
