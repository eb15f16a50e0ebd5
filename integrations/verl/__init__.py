"""verl 0.9: the whole rollout, a client for its agent loops, or a router for its own servers.

verl loads `manager.ScheduledAgentLoopManager`, `manager.GatewayAgentLoopManager` and
`router.Router` by name. Only `manager`, `gateway_client` and `router` import verl or Ray at import.
"""
