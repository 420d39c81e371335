"""The one kind of error that is the user's to mend."""


class UsageError(ValueError):
    """One line: what is wrong and what would be right. Commands print it and exit with status 2."""
