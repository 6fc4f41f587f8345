"""`python -m graftlm` is the command `graftlm`."""

from graftlm.cli import main

main()
