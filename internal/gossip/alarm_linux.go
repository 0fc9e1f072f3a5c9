// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package gossip

import (
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// newAlarm returns a timer of the kernel, which the poller waits for as for a socket. Where there
// is none, as in some sandboxes, it returns the runtime's timer.
func newAlarm() alarm {
	fd, err := unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_NONBLOCK|unix.TFD_CLOEXEC)
	if err != nil {
		return newRuntimeAlarm()
	}
	a := &kernelAlarm{fd: fd, file: os.NewFile(uintptr(fd), "timerfd"), ring: make(chan struct{}, 1), ended: make(chan struct{})}
	go a.read()
	return a
}

type kernelAlarm struct {
	fd    int
	file  *os.File
	ring  chan struct{}
	ended chan struct{}
}

// read is the alarm's goroutine.
func (a *kernelAlarm) read() {
	defer close(a.ended)
	var b [8]byte
	for {
		if _, err := a.file.Read(b[:]); err != nil {
			return
		}
		select {
		case a.ring <- struct{}{}:
		default:
		}
	}
}

func (a *kernelAlarm) set(d time.Duration) {
	next := unix.ItimerSpec{Value: unix.NsecToTimespec(int64(max(d, 1)))} // 0 would stop it
	_ = unix.TimerfdSettime(a.fd, 0, &next, nil)                          // fails for a bad descriptor or time only
}

func (a *kernelAlarm) rings() <-chan struct{} { return a.ring }

func (a *kernelAlarm) close() {
	_ = a.file.Close()
	<-a.ended
}
