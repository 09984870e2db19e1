"""People are told what they should know: the event log is followed, and what is worth it is sent by apprise."""
