"""The shipped machine, looked at in every order of events that a small card can meet."""
