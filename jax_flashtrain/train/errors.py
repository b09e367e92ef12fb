"""The one error that the command line turns into a line on stderr and exit code 2."""


class UserError(Exception):
    """Something the user can put right; the text is one line and says how."""
