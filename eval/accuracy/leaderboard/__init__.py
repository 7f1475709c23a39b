"""The leaderboard: methods ranked by task, context and bytes read, with rows that others submit."""
