"""Methods of other libraries on the work of ours: what is compared, and how it is judged."""
