"""End to end: real servers, one after the other, under the same requests of token ids."""
