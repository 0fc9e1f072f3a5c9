// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import "time"

// WithClock replaces the monotonic clock, which counts from an origin of its own and is
// never below 0. Timers still follow the runtime's clock.
func WithClock(now func() time.Duration) Option { return func(g *Guard) { g.now = now } }
