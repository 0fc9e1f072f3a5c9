// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package chaosrun

import (
	"errors"
	"io"
	"os/exec"
	"runtime"
	"sync/atomic"
)

// burn starts a computing process for each processor, each in a session of its own. Linux shares
// the processors between sessions. With all of them in one session, Linux 6.18 gave that session
// all processors for up to 12 s, and the broker none. end stops the processes, and returns their
// processor time in milliseconds.
func burn(exe string) (end func() (ms int, err error), err error) {
	var all []*process
	end = func() (ms int, err error) {
		for _, p := range all {
			_ = p.stdin.Close()
			err = errors.Join(err, p.cmd.Wait())
			ms += int(p.cmd.ProcessState.UserTime().Milliseconds())
		}
		return ms, err
	}
	for range runtime.NumCPU() {
		cmd := exec.Command(exe, "chaos", "burn") //nolint:noctx // it ends with stdin
		cmd.SysProcAttr = ownSession()
		stdin, err := cmd.StdinPipe()
		if err == nil {
			err = cmd.Start()
		}
		if err != nil {
			_, ended := end()
			return nil, errors.Join(err, ended)
		}
		all = append(all, &process{cmd, stdin})
	}
	return end, nil
}

// Burn computes until stdin ends.
func Burn(stdin io.Reader) {
	var over atomic.Bool
	go func() {
		_, _ = io.Copy(io.Discard, stdin)
		over.Store(true)
	}()
	for !over.Load() { //nolint:revive // that is the point
	}
}
