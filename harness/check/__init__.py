"""Whether prepared bytes are right: the ladder of checks, the judge, and second opinions."""
