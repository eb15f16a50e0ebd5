"""verl 0.9: a whole rollout, a client for its agent loops, or a router for its own servers.

What verl loads by name: `manager.ScheduledAgentLoopManager`, `manager.GatewayAgentLoopManager` and
`router.Router`. Only `manager`, `gateway_client` and `router` import verl or Ray with themselves.
"""
