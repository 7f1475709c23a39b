"""vcsd behind the interfaces of serving engines: a module for each, which imports the engine it is for."""
