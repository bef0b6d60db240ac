"""The distributions that users make: the base's layouts and checks, with `explain` and `verify`."""
