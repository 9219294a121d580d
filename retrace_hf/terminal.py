"""Commands and scripts: what a user can mend is one line."""

import sys
from collections.abc import Callable


def run_command(main: Callable[[], None], name: str) -> None:
    """Runs `main`; a ValueError, OSError or ImportError is reported in one line, with exit status 1. Anything else is
    a bug and keeps its traceback. Ctrl-C ends it with one line and status 130."""
    try:
        main()
    except (ValueError, OSError, ImportError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print(f"{name}: interrupted; the same command goes on from what is on the disk.", file=sys.stderr)
        sys.exit(130)
