// What only a comparison needs, rivals above all, stays out of the go.mod that
// users of the library resolve.

module github.com/stormguard-mq/stormguard/bench

go 1.26.0

replace github.com/stormguard-mq/stormguard => ../

require github.com/stormguard-mq/stormguard v0.0.0
