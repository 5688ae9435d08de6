"""The mistakes a user can make, as exceptions whose message is one line that says what to do."""


class UserError(ValueError):
    """A user's mistake. The command line prints the message as one line and exits with status 2."""


class ExtraMissing(UserError):
    """A command needs an optional dependency that is not installed."""
