"""What a plan says: shards of tables, the plan as a whole, and the interface of sharders. Pure facts."""
