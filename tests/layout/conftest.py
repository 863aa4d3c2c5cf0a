from hypothesis import settings

# Cores are shared with tests that start processes, so the time of one example says little.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")
