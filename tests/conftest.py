from hypothesis import settings

# A slow machine is no counterexample: pytest's own timeout bounds a test.
settings.register_profile("sangam", deadline=None)
if settings.get_current_profile_name() == "default":
    settings.load_profile("sangam")
