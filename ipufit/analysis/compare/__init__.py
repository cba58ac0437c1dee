"""Numbers held against numbers: a program against its module, one division against another."""
