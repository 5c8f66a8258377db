"""Sharded EmbeddingBagCollection and EmbeddingCollection, their sharders, tables and optimizer."""
