// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardhttp

import (
	"errors"
	"fmt"
	"net/http"
)

var (
	// errNotReplayed is the error of a dead letter whose request was answered 202, and not replayed
	// before the intake was closed.
	errNotReplayed = errors.New("nethttp: closed before the request was replayed")

	// errUnfinished is the error of a dead letter whose replay had begun, and had not returned when
	// the intake was closed. The replay may still succeed.
	errUnfinished = errors.New("nethttp: closed while the request was being replayed")

	// errConfig is the beginning of each refusal of a configuration.
	errConfig = errors.New("nethttp: config")

	// errGone is the outcome of a handler that wrote nothing before the request's own context had
	// ended. The client has left, or the server or a middleware has ended it.
	errGone = errors.New("nethttp: the request ended before there was an answer")

	// errRefused is the outcome of a handler whose answer was the refusal of another intake. It
	// says nothing about this intake's dependency.
	errRefused = errors.New("nethttp: refused by another intake")
)

// StatusError is the outcome of a handler that answered with a status that
// counts as a failure.
type StatusError struct {
	Status int
	// Text is the beginning of a replay's answer, which nobody else gets. It is empty for a live
	// request, whose client reads the answer.
	Text string
}

// rejects tells whether a replay's answer is about the request, and so no outcome of the
// dependency.
func (e *StatusError) rejects() bool {
	switch e.Status {
	case http.StatusRequestTimeout, http.StatusTooEarly, http.StatusTooManyRequests:
		return false
	}
	return e.Status >= 400 && e.Status < 500
}

func (e *StatusError) Error() string {
	text := fmt.Sprintf("nethttp: the handler answered %d %s", e.Status, http.StatusText(e.Status))
	if e.Text != "" {
		text += ": " + e.Text
	}
	return text
}
