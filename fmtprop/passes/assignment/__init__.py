"""Assignment of formats by a policy, and what earlier assignments are good for."""
