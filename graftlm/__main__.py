"""The command `graftlm`, as `python -m graftlm`."""

from graftlm.cli import main

main()
