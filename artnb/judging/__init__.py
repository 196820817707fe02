"""How does a language model compare attempts? Prompts, answers, endpoints and what they cost."""
