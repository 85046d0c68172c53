"""A user's own model: an embedding, blocks and a head, all plain modules. docs/own-model.md has the contract.

spec.py       what the rest of the program knows of it; no torch
reference.py  `file.py:Name`: from a class to the words that find it again, and back; no torch
contract.py   a module looked over without memory: its numbers, or all that is wrong with it
decoder.py    its parts as the decoder that is trained, and their first values
"""
