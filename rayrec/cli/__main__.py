"""`python -m rayrec.cli`, the same as `rayrec`."""

from rayrec.cli.main import main

main()
