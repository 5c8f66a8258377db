"""`python -m rayrec.cli`, the same as `rayrec`."""

from rayrec.cli.app import main

main()
