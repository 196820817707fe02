"""Where is a policy sampled and trained? One module a place; ``base`` says what all of them do."""
